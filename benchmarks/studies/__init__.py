"""What papers claim of methods, and our report of its statistics, measured where every quantity is known: no model, no data.

A study is a generator of :class:`~.report.Finding` handed to :func:`~.report.main`. Each runs by itself::

    python -m tunery.benchmarks.studies.partially_decomposable [--quick] [--seed 0] [--output_dir results/studies/NAME]
"""
