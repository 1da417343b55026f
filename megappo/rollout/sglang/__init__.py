"""Generation by SGLang servers: see docs/rollouts.md."""
