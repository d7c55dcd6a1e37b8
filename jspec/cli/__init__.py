"""The command line: parsing and printing. Only programs read the environment."""
