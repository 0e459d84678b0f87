"""First-party probes: what is measured about the weights."""
