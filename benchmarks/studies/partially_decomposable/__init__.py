"""The analysis of the Multi-LoRA paper, checked number by number in float64.

Anonymous, "Parameter-efficient fine-tuning via partially decomposable loss analysis and sharing", section 4 and appendices A
and B. What holds: the gradient decomposes over the tasks (Claim 4.2), the joint loss is k gamma-Lipschitz and k beta-smooth
(Lemmas 4.4 and 4.6), the gradient of softmax regression (Lemma B.3). What does not: strong convexity needs no condition, and
Lemma A.1 is no counterexample to it; the Hessian of Lemma B.4 is wrong, and most of Table 3 does not come back.
"""
