"""Structured output on the host: grammars to token automata."""
