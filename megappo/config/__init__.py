"""Configuration: schema, loading, checks, verl import. Imports neither torch nor anything heavy."""
