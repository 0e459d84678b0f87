"""Does more pre-training make a small decoder more fragile? A controlled study at sizes that a CPU core trains.

Springer et al., "Overtrained language models are harder to fine-tune", section 3 and appendix C: a decoder is pre-trained from
one initialisation at several token budgets, each a run of its own with warmup and a cosine that ends at zero; then Gaussian
noise is put into every checkpoint (the ``gaussian`` probe), and every checkpoint is fine-tuned with several learning rates and
seeds (``tunery sensitivity``). What the curves show is written to report.md, whatever it is.

The text is that of --data_files (.txt, or .jsonl with a column "text"), by default the standard library's sources outside the
packages whose docstrings are fine-tuned on. Text is held in memory, and repeated where a budget is larger, which the
report says. --size 15m, 30m and 90m are the paper's Table 3 with its budgets of 4B to 128B tokens; its names do not match its
table (see benchmarks/sensitivity/recipes/olmo_30m.yaml). A transformers Llama stands for OLMo: it has attention dropout only,
and no muP. A killed study goes on where it was.
"""
