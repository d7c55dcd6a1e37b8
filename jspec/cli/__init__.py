"""The command line: parsing and printing. Only this package reads the environment."""
