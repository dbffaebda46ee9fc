"""The command line: thin, and the only room that prints."""
