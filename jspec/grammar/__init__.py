"""Structured output on the host: grammars compiled to token automata."""
