"""The stability bounds of the paper as functions of the numbers they name.

Definition 2.1 measures stability by E |A(S^i) - A(S)|, the distance between the weights trained on all samples and on all
but sample ``i``; Definition 2.3 by the distance between their directions.
"""

from __future__ import annotations

import math


def theorem_2_2(*, n: int, lipschitz: float, beta: float, mu: float, distance: float) -> float:
    """Bound Definition 2.1 for full fine-tuning near the optimum (Theorem 2.2, eq. 3), as printed.

    sqrt(2 L |w0 - w*| / beta) / (n (1 / q - 1)) with q = (1 - mu / beta)^(1/4), for gradient descent with step 1 / beta on
    losses with f(w*, x) = 0; the root covers the whole numerator, as in the proof. The proof's sum starts at t = 1 though
    the first step already tells the two runs apart; :func:`theorem_2_2_corrected` counts that step.

    Args:
        n: samples.
        lipschitz: L, the Lipschitz constant of every sample's loss where the run passes.
        beta, mu: largest and smallest curvature of every sample's loss.
        distance: |w0 - w*|.
    """
    return _contraction(mu, beta) * theorem_2_2_corrected(n=n, lipschitz=lipschitz, beta=beta, mu=mu, distance=distance)


def theorem_2_2_corrected(*, n: int, lipschitz: float, beta: float, mu: float, distance: float) -> float:
    """Return Theorem 2.2's bound with the step at t = 0: sqrt(2 L |w0 - w*| / beta) / (n (1 - q)), 1 / q times as large."""
    return math.sqrt(2 * lipschitz * distance / beta) / (n * (1 - _contraction(mu, beta)))


def _contraction(mu: float, beta: float) -> float:
    return math.sqrt(math.sqrt(1 - mu / beta))


def convergence_rate(t: int) -> float:
    """Return log log t / log t, the rate at which a head's direction approaches the maximal margin's (first term of eq. 6).

    Raises:
        ValueError: ``t`` is below 3, where the logarithm of the logarithm is not positive.
    """
    if t < 3:
        raise ValueError(f"log log t is positive from t = 3 on, and t is {t}")
    return math.log(math.log(t)) / math.log(t)


def svm_distance(*, n: int, regularization: float, bound: float, margin: float) -> float:
    """Bound how far the support vector machine moves when one sample is left out (Lemma A.2.5, second term of eq. 6).

    max{sqrt(2 (1 + B / gamma) / (lambda n)), (B + sqrt(B^2 + 8 n lambda (1 + B / gamma))) / (2 n lambda)}. The second is the
    larger, always: without its B and B^2 the two are equal.

    Args:
        n: samples.
        regularization: lambda of the soft-margin machine, lambda |w|^2 + mean hinge loss.
        bound: B, the largest norm of a sample.
        margin: gamma, 1 over the norm of the machine's weights.
    """
    lam, inner = regularization, 1 + bound / margin
    first = math.sqrt(2 * inner / (lam * n))
    return max(first, (bound + math.sqrt(bound**2 + 8 * n * lam * inner)) / (2 * n * lam))


def direction_constant(norm: float) -> float:
    """Return nu = 2 / r, the Lipschitz constant of w / |w| where no |w| is below ``norm`` = r (Lemma A.2.1)."""
    return 2 / norm


def theorem_2_4(*, n: int, t: int, c: float, nu: float, regularization: float, bound: float, margin: float) -> float:
    """Bound Definition 2.3 for head tuning (Theorem 2.4, eq. 6): C log log t / log t + nu :func:`svm_distance`.

    Args:
        n, regularization, bound, margin: as in :func:`svm_distance`.
        t: steps of gradient descent.
        c: C, of the convergence to the maximal margin; the paper gives no value.
        nu: as :func:`direction_constant` gives it.
    """
    return c * convergence_rate(t) + nu * svm_distance(n=n, regularization=regularization, bound=bound, margin=margin)


def corollary_2_5(*, n: int, t: int, c: float, nu: float, regularization: float, lipschitz: float) -> float:
    """Bound Definition 2.3 by the Lipschitz constant (Corollary 2.5, eq. 7): C log log t / log t + nu L / (lambda n).

    Args:
        n, t, c, nu, regularization: as in :func:`theorem_2_4`.
        lipschitz: L of a sample's hinge loss; sqrt(B^2 + 1) for inputs [x, -1].
    """
    return c * convergence_rate(t) + nu * lipschitz / (regularization * n)


def corollary_3_1_rate(*, heads: int, t: int, c: float, xi: float, delta: float) -> float:
    """Return the first term of Corollary 3.1 (eq. 11), which holds with probability 1 - delta.

    sqrt((2 + 8 ln(1 / delta)) / H) C xi log log t / log t; the second term is Theorem 2.4's.

    Args:
        heads: H.
        t, c: as in :func:`theorem_2_4`.
        xi: how much longer the longest head's part along the maximal margin is than the mean head's.
        delta: probability that it fails.

    Raises:
        ValueError: there are too few heads for it, H <= 2 + 8 ln(1 / delta), or ``delta`` is no probability between 0 and 1.
    """
    if not 0 < delta < 1:
        raise ValueError(f"delta lies between 0 and 1, and is {delta}")
    needed = 2 + 8 * math.log(1 / delta)
    if heads <= needed:
        raise ValueError(f"Corollary 3.1 needs more than {needed:.2f} heads at delta = {delta}, and H is {heads}")
    return math.sqrt(needed / heads) * c * xi * convergence_rate(t)


def corollary_3_1(
    *,
    n: int,
    heads: int,
    t: int,
    c: float,
    xi: float,
    delta: float,
    nu: float,
    regularization: float,
    bound: float,
    margin: float,
) -> float:
    """Bound Definition 2.3 for the mean of several heads (Corollary 3.1, eq. 11), with probability 1 - delta.

    :func:`corollary_3_1_rate` + nu :func:`svm_distance`: heads shrink the first term alone.

    Args:
        n, regularization, bound, margin: as in :func:`svm_distance`.
        heads, xi, delta: as in :func:`corollary_3_1_rate`.
        t, c, nu: as in :func:`theorem_2_4`.

    Raises:
        ValueError: as :func:`corollary_3_1_rate`.
    """
    moved = svm_distance(n=n, regularization=regularization, bound=bound, margin=margin)
    return corollary_3_1_rate(heads=heads, t=t, c=c, xi=xi, delta=delta) + nu * moved


def step_limit(largest_singular_value: float, n: int) -> float:
    """Return the step below which gradient descent on the mean logistic loss of ``n`` samples descends: 8 n / sigma_max^2.

    2 / (beta sigma_max^2) for the sum of losses, with beta = 1/4. Theorem 2.4 prints sigma_max to the first power, which has
    not the unit of a step: doubling every feature must divide it by four.
    """
    return 8 * n / largest_singular_value**2
