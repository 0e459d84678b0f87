"""The engine of real federations: NVFLARE's server and sites, over mutual TLS, with what tunery needs and nothing more allowed.

    tunery federate provision project.yaml --output_dir kits     # one start-up kit for the server, each site and the admin
    tunery federate server kits/server server.yaml               # on the server's machine
    tunery federate site kits/site-1 site.yaml                   # on each site's
    tunery federate submit kits/admin --sites 2                  # begins when these are there, and waits for the end

A kit holds keys: send each to its owner alone. The job that ``submit`` sends names two classes of ours and has no code and no
arguments; what model, data and strategy are is in the recipe each party starts with. A site's allow-list has our one class in
it, and its policy takes no job that brings code.

Only ``controller`` and ``executor`` import NVFLARE when they are imported: the engine loads these itself.
"""
