"""First-party strategies: what trains, and what the trained artefact is."""
