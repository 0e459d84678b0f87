"""The ground: what a plugin is and how it is found. Imports nothing of ours, and torch only for typing."""
