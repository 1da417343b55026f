"""`python -m megappo_cli …`, which is what every launcher starts."""

from megappo_cli.main import main

if __name__ == "__main__":
    main()
