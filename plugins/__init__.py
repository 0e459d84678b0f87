"""First-party methods, one file each. They stand on ``registry`` and know neither the core nor each other."""
