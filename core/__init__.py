"""What happens in a run. Stands on ``registry`` and never names a plugin; read ``run.py`` first."""
