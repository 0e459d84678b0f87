"""The synthetic studies of head tuning and stability: two bounded clusters, a linear head, one sample left out.

Fu, So and Collier, "A stability analysis of fine-tuning a pre-trained model", section 4.3 (Figures 5 to 9), beside Theorems
2.2 and 2.4 and Corollaries 2.5 and 3.1. The paper says "linear regression"; only a loss such as the logistic one drives a
head to the maximal margin, so that is used. It leaves dimension, step size and number of steps open: here 10, below the
theorem's limit, and 300. Heads start independently. Where the paper averages over 500 data sets of 2000 samples, this study has
200 of 500 (Figure 5: 50), and four samples left out of each: standard errors stand beside what is measured.
Stability is the mean distance between the directions of the head trained on all samples and on all but one (Definition
2.3); smaller is more stable. A bound above 2 says nothing: no two directions are farther apart.
"""
