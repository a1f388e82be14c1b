"""The five families, each declared once: see `lagraph.node` for what follows from a declaration."""

from lagraph.nodes.gdn import GDN
from lagraph.nodes.gdn2 import GDN2
from lagraph.nodes.gdp import GDP
from lagraph.nodes.kda import KDA
from lagraph.nodes.mamba2 import MAMBA2

__all__ = ["GDN", "GDN2", "GDP", "KDA", "MAMBA2"]
