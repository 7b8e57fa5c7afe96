"""Published numbers, as printed; each table names where it stands in the specification."""

import csv
import io

from gnnplan.planner.cost.systems import SystemOverhead

RUNTIMES = """\
pes,dataset,sampler,mode,samp,feat_nocache,feat_cache,feat_cache_kappa,fb,total
4,papers100M,LABOR-0,Indep,21.7,18.4,16.8,11.2,8.9,41.8
4,papers100M,LABOR-0,Coop,17.7,14.0,10.1,5.8,13.0,36.5
4,papers100M,NS,Indep,16.1,26.5,22.1,,10.1,48.3
4,papers100M,NS,Coop,11.9,21.3,12.9,,15.0,39.8
4,mag240M,LABOR-0,Indep,26.0,57.9,56.0,41.0,199.9,266.9
4,mag240M,LABOR-0,Coop,20.0,51.1,36.9,23.4,183.3,226.7
4,mag240M,NS,Indep,14.4,78.0,71.2,,223.0,308.6
4,mag240M,NS,Coop,12.3,73.9,47.5,,215.6,275.4
8,papers100M,LABOR-0,Indep,21.3,21.1,18.7,12.0,9.3,42.6
8,papers100M,LABOR-0,Coop,16.5,12.4,7.1,4.0,13.5,34.0
8,papers100M,NS,Indep,15.8,31.0,24.5,,10.3,50.6
8,papers100M,NS,Coop,12.5,19.4,9.0,,15.6,37.1
8,mag240M,LABOR-0,Indep,30.6,70.1,66.2,46.8,202.1,279.5
8,mag240M,LABOR-0,Coop,21.6,50.6,29.0,19.3,172.2,213.1
8,mag240M,NS,Indep,15.0,94.9,80.9,,224.8,320.7
8,mag240M,NS,Coop,14.9,71.6,39.6,,209.0,263.5
16,papers100M,LABOR-0,Indep,39.1,44.5,40.2,29.4,15.1,83.6
16,papers100M,LABOR-0,Coop,26.9,22.7,10.4,4.9,19.1,50.9
16,papers100M,NS,Indep,18.0,61.3,52.0,,16.2,86.2
16,papers100M,NS,Coop,19.2,34.9,13.0,,21.3,53.5
16,mag240M,LABOR-0,Indep,50.8,128.8,121.3,96.2,156.1,303.1
16,mag240M,LABOR-0,Coop,29.2,78.1,42.8,23.5,133.3,186.0
16,mag240M,NS,Indep,19.3,167.3,152.6,,170.9,342.8
16,mag240M,NS,Coop,19.3,116.1,53.1,,160.4,232.8
"""
"""formulas 5.8: milliseconds per mini-batch, Balin et al."""
SAMPLERS_TABLE = """\
dataset,algo,V3,E2,V2,E1,V1,E0,V0,it_s,test_f1,std
reddit,PLADIES,24,2390,14.1,927,6.0,33.2,1,1.7,96.21,0.06
reddit,LADIES,25,2270,14.5,852,6.0,32.5,1,1.8,96.20,0.05
reddit,LABOR-*,24,1070,13.7,435,6.0,26.9,1,4.1,96.23,0.05
reddit,LABOR-1,27,261,14.4,116,6.1,16.7,1,24.8,96.23,0.06
reddit,LABOR-0,36,177,17.8,67,6.8,9.6,1,37.6,96.25,0.05
reddit,NS,167,682,68.3,100,10.1,9.7,1,14.2,96.24,0.05
products,PLADIES,160,2380,51.2,293,9.7,11.7,1,4.1,78.44,0.24
products,LADIES,165,2230,51.8,270,9.7,11.5,1,4.2,78.59,0.22
products,LABOR-*,166,1250,51.8,167,9.8,10.6,1,6.2,78.59,0.34
products,LABOR-1,178,799,53.4,136,9.8,10.5,1,21.3,78.47,0.26
products,LABOR-0,237,615,62.4,100,10.1,9.9,1,32.5,78.76,0.26
products,NS,513,944,95.4,106,10.6,9.9,1,24.6,78.48,0.29
yelp,PLADIES,100,1300,29.5,183,6.2,6.9,1,5.1,61.55,0.87
yelp,LADIES,102,1280,29.7,182,6.2,6.9,1,5.3,61.89,0.66
yelp,LABOR-*,105,991,30.7,158,6.1,6.8,1,13.3,61.57,0.67
yelp,LABOR-1,109,447,31.0,96,6.2,6.8,1,27.3,61.71,0.70
yelp,LABOR-0,138,318,35.1,54,6.2,6.3,1,27.2,61.55,0.85
yelp,NS,188,392,42.5,55,6.3,6.3,1,23.0,61.50,0.66
flickr,PLADIES,55,309,24.9,85,6.2,6.9,1,10.2,51.52,0.26
flickr,LADIES,56,308,25.1,85,6.2,6.9,1,10.5,50.79,0.29
flickr,LABOR-*,57,308,25.6,85,6.3,6.9,1,20.3,51.67,0.27
flickr,LABOR-1,58,242,25.9,73,6.3,6.9,1,32.7,51.66,0.24
flickr,LABOR-0,66,219,29.1,52,6.4,6.7,1,33.3,51.65,0.26
flickr,NS,73,244,32.8,52,6.4,6.7,1,31.7,51.70,0.23
"""
"""formulas 5.8: thousands of vertices and edges per batch of 1000 seeds, by sampler."""
SPEEDUPS = {
    ("papers100M", "LABOR-0"): (14.5, 25.3, 64.2),
    ("papers100M", "NS"): (21.4, 36.4, 61.1),
    ("mag240M", "LABOR-0"): (17.7, 31.2, 63.0),
    ("mag240M", "NS"): (12.1, 21.7, 47.3),
}
"""formulas 5.8: per cent on 4, 8 and 16 processors."""
COOPERATIVE_FANOUTS, COOPERATIVE_CACHE = (10, 10, 10), 2_000_000
"""formulas 5.8: cache 2M rows; fan-out 10 and three layers inferred there."""
UVA_OVERHEAD = SystemOverhead(batch_seconds=4e-3, row_share=0.45, compute_factor=2.0)
"""Median of its class's frameworks (DGL and GraphBolt with lists or rows on the host), each fitted
to other papers' published times (`published_fit`), none of them of this table."""
GLOBAL_BATCH = {4: 1 << 12, 8: 1 << 13, 16: 1 << 13}
"""formulas 5.8, |S^0|, inferred there."""

BNS_GAINS = """\
case,thr_METIS,thr_Random,mem_METIS,mem_Random,boundary_METIS,boundary_Random
reddit8,3.1,5.0,0.47,0.36,460,1016
products10,3.4,7.3,0.75,0.31,1848,16797
yelp10,3.1,5.1,0.83,0.49,649,2026
"""
"""formulas 3.7: p = 0.1 against p = 1; boundary nodes in thousands."""
BNS_EPOCHS = """\
case,method,comm_MB,epoch_s
reddit2,DropEdge,301.3,0.613
reddit2,BES,207.9,0.484
reddit2,BNS,30.4,0.319
products5,DropEdge,1364.0,0.938
products5,BES,521.1,0.551
products5,BNS,138.7,0.388
yelp3,DropEdge,718.7,0.606
yelp3,BES,195.3,0.328
yelp3,BNS,75.7,0.270
"""
"""formulas 3.7, p = 0.1."""
BNS_MODELS = {"reddit": (4, 256), "products": (3, 128), "yelp": (4, 512)}
"""formulas 3.7, hyper-parameters: SAGE layers and hidden width."""
BNS_INDUCTIVE = frozenset({"reddit", "yelp"})
"""Data sets whose released scripts train on the training nodes alone (GATECH-EIC/BNS-GCN, scripts,
`--inductive`); all of its scripts have the first layer's sums known beforehand (`--use-pp`)."""
BNS_LINEAR = {"yelp": 2}
"""Last layers that do not aggregate (the same scripts, `--n-linear`)."""

EFFICIENCY = {"products": 0.88, "papers100m": 0.47, "protein": 0.61}
"""formulas 4.9: parallel efficiencies of Tripathy et al.; the numbers of GPUs are not at hand."""
SAMPLING_SHARE = 0.10
"""formulas 4.9: sampling of the total on Papers at the smallest number of GPUs."""
BATCHES = {"products": 196, "papers100m": 1172, "protein": 1024}
"""formulas 4.9."""
MATRIX_GRAPHS = {
    "products": (2_400_000, 126_000_000, 100),
    "papers100m": (111_000_000, 1_600_000_000, 128),
    "protein": (8_700_000, 1_300_000_000, 128),
}
"""formulas 4.9: vertices, edges (products in both directions), features."""
TRIPATHY_BATCH, TRIPATHY_FANOUTS, TRIPATHY_HIDDEN = 1024, (15, 10, 5), 256
"""formulas 4.9, SAGE."""


def rows(table: str) -> list[dict[str, str]]:
    """A table's lines by column."""
    return list(csv.DictReader(io.StringIO(table)))
