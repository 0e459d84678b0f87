"""Claims about speed and memory, each measured by a script of its own against a peer."""
