"""Fine-tuning sensitivity: learning rates x checkpoints x seeds, in-domain and out-of-domain perplexity.

Springer et al., "Overtrained language models are harder to fine-tune", section 3.4 and figures 4 to 8. ``plan`` reads a recipe,
``cells`` fine-tunes and scores one checkpoint with one learning rate and seed, ``analysis`` says what the curves show,
``pictures`` draws them, ``commands`` is ``tunery sensitivity``.
"""
