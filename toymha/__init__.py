"""A laboratory for attention: toy language models, sweeps and verdicts on the command line."""
