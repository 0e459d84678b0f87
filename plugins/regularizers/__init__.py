"""First-party regularizers: what the loss adds, or the weights do."""
