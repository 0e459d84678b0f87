"""Federated rounds: clients keep their rows, train a strategy on them, and send weights that a server averages.

    tunery federate recipe.yaml                   # or federate(build_federated_options({...})) from Python

Read ``run`` first, the story of a federation; then ``rounds``, its loop. What a client is and does is all in ``worker``, what
the server keeps and sends in ``server``. Both are written against one seam, ``engine.Engine``: payloads out to named nodes,
payloads back, and a node that does not answer is one that failed.
"""
