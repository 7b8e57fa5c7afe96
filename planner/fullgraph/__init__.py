"""Plan full-graph training with boundary-node sampling: graph + machine -> parts, p, plan.

    check -> candidates -> partitions -> profile (parts timed on these cores) -> p -> price -> plan

Source: BNS-GCN (Wan et al., MLSys 2022); docs/formulas.md section 3.
"""
