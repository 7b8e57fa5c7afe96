"""Matrix-based sampling on a 1.5D grid: words, seconds, and how many copies and batches fit.

Grid of R = p/c process rows times c columns; k batches of b seeds in one bulk, d non-zeros per
row of A. After Tripathy et al., MLSys 2024; restored and checked in docs/formulas.md 4.6 to 4.9. A
word is one entry on the wire: a column id (the runtime sends no values of a graph without weights).
"""

import math


def stage_ids(num_rows: float | int, ranks: int, replication: int) -> float:
    """Ids that come together at the process that serves a stage.

    m = k b c / p

    Args:
        num_rows: k b, non-zeros of Q over all batches.
        ranks: p.
        replication: c.

    Source: docs/formulas.md 4.7 [M8].

    >>> stage_ids(8, 4, 2)
    4.0
    """
    return num_rows * replication / ranks


def sender_words(num_rows: float | int, degree: float | int, ranks: int, replication: int) -> float:
    """Words that a serving process sends, once, in its own stage; also the non-zeros of P_i.

    w = c k b d / p

    Args:
        num_rows: k b.
        degree: d, mean non-zeros of the rows asked for.
        ranks: p.
        replication: c.

    Source: docs/formulas.md 4.7 [M8], [C15].

    >>> sender_words(8, 2, 4, 2), sender_words(1024, 1, 16, 2)
    (8.0, 128.0)
    """
    return replication * num_rows * degree / ranks


def column_words(num_rows: float | int, degree: float | int, replication: int) -> float:
    """Words that a process column sends over all its stages, one after another.

    w R/c = k b d / c

    Source: docs/formulas.md 4.7 [C15].

    >>> column_words(1024, 1, 2)
    512.0
    """
    return num_rows * degree / replication


def distinct_rows(draws: float | int, block_rows: int, num_nodes: int) -> float:
    """Rows of a block that are asked for, when each id is sent once.

    E = B (1 - (1 - 1/n)^m),  m = k b c / p uniform columns

    Args:
        draws: m R: uniform columns of a process row's stack over all n vertices.
        block_rows: B, rows of the block.
        num_nodes: n.

    Source: docs/formulas.md 4.7 [C15]; saturates at B.

    >>> round(distinct_rows(1e9, 100, 1000)), round(distinct_rows(10, 500, 1000), 2)
    (100, 4.98)
    """
    return block_rows * -math.expm1(draws * math.log1p(-1.0 / num_nodes))


def link_words(num_rows: float | int, degree: float | int, ranks: int, replication: int) -> float:
    """Words that cross links over all ranks: rows in stages, and P_i inside process rows.

    k b d (1 - c/p) + k b d (c - 1)

    A process asks itself for the c/p of rows that lie in its own block; of P_i each process has
    1/c already.

    Source: derived from docs/formulas.md 4.6 for disjoint parts of P_i.

    >>> link_words(8, 2, 4, 2), link_words(8, 2, 4, 1), link_words(8, 2, 4, 4)
    (24.0, 12.0, 48.0)
    """
    whole = num_rows * degree
    return whole * (ranks - replication) / ranks + whole * (replication - 1)


def stage_rounds(ranks: int, replication: int) -> int:
    """Stages of the busiest column: ceil(R/c).

    Source: docs/formulas.md 4.6 [C16].

    >>> stage_rounds(16, 2), stage_rounds(28, 4)
    (4, 2)
    """
    return math.ceil(ranks // replication / replication)


def probability_seconds(
    num_rows: float | int,
    degree: float | int,
    ranks: int,
    replication: int,
    *,
    latency_seconds: float | int,
    word_seconds: float | int,
    one_shot: bool,
) -> float:
    """Seconds of P = QA for one layer.

    staged:   T = alpha n_msg + beta (k b d / c + c k b d / p)
    one-shot: T = alpha n_msg + beta (c k b d / p + c k b d / p)
    n_msg = rounds (R - 1) + log2 c, with rounds = ceil(R/c) staged and 1 in one all-to-allv

    Args:
        num_rows: k b.
        degree: d.
        ranks: p.
        replication: c.
        latency_seconds: alpha, per message.
        word_seconds: beta, per word.
        one_shot: All stages of a column in one all-to-allv.

    Source: docs/formulas.md 4.7; the first beta term falls and the second grows with c, so that
    staged the bandwidth is best near c = sqrt(p) [M9], in one shot at c = 1.

    >>> staged = [probability_seconds(64, 1, 64, c, latency_seconds=0, word_seconds=1,
    ...     one_shot=False) for c in (1, 8, 64)]
    >>> staged
    [65.0, 16.0, 65.0]
    """
    rows = ranks // replication
    rounds = 1 if one_shot else stage_rounds(ranks, replication)
    reduced = sender_words(num_rows, degree, ranks, replication)
    sent = reduced if one_shot else column_words(num_rows, degree, replication)
    messages = rounds * (rows - 1) + math.log2(replication)
    return latency_seconds * messages + word_seconds * (sent + reduced)


def remote_fraction(ranks: int, replication: int) -> float:
    """Share of feature rows that another rank of the process column holds.

    1 - c/p

    Source: docs/formulas.md 4.8 [M10].

    >>> [remote_fraction(8, c) for c in (1, 2, 4, 8)]
    [0.875, 0.75, 0.5, 0.0]
    """
    return 1 - replication / ranks


def fetch_words(num_inputs: float | int, feature_dim: int, ranks: int, replication: int) -> float:
    """Words of feature rows that one batch receives, in R - 1 messages.

    |S| f (1 - c/p)

    Source: docs/formulas.md 4.8.

    >>> fetch_words(1000, 64, 8, 2)
    48000.0
    """
    return num_inputs * feature_dim * remote_fraction(ranks, replication)


def largest_replication(
    ranks: int,
    memory_bytes: float | int,
    feature_bytes: float | int,
    topology_bytes: float | int,
    *,
    other_bytes: float | int = 0.0,
    topology_partitioned: bool = True,
) -> int:
    """The most copies that fit: an upper bound for the divisors of p that are worth evaluating.

    c_max = floor(p (M - M_other) / (N f w + A))        A partitioned
          = floor(p (M - M_other - A) / (N f w))        A on every rank: subtract it first

    Args:
        ranks: p.
        memory_bytes: M, per rank.
        feature_bytes: N f w, of all rows.
        topology_bytes: A, of the whole adjacency.
        other_bytes: Model and smallest bulk.
        topology_partitioned: Whether A is cut like the features.

    Returns:
        c_max, at most p; 0 where not even one copy fits.

    Source: docs/formulas.md 4.9 [M12], [C17].

    >>> largest_replication(8, 20e9, 111059956 * 128 * 4, 0)
    2
    """
    room = memory_bytes - other_bytes - (0.0 if topology_partitioned else topology_bytes)
    whole = feature_bytes + (topology_bytes if topology_partitioned else 0.0)
    return max(0, min(ranks, math.floor(ranks * room / whole)))


def replications(ranks: int, most: int) -> list[int]:
    """Candidates for c: the divisors of p up to `most`.

    >>> replications(12, 5)
    [1, 2, 3, 4]
    """
    return [c for c in range(1, min(ranks, most) + 1) if ranks % c == 0]


def largest_bulk(
    free_bytes: float | int,
    batch_bytes: float | int,
    ranks: int,
    replication: int,
    batches_per_epoch: int,
    *,
    topology_partitioned: bool,
) -> int:
    """k: the batches over all ranks that one bulk may hold.

    k = floor(M_free / bytes per batch) * (p with A replicated, p/c with A partitioned), at most the
    epoch's

    A process row holds its stack c times, so partitioned only R stacks differ. 0: lower the batch.

    Source: docs/formulas.md 4.9.

    >>> largest_bulk(10e9, 3e9, 8, 2, 1000, topology_partitioned=True)
    12
    """
    different = ranks // replication if topology_partitioned else ranks
    return min(math.floor(free_bytes / batch_bytes) * different, batches_per_epoch)
