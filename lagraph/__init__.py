"""Linear attention and state-space layers as graphs: GDN, KDA, GDN-2, GDP and Mamba-2."""

__version__ = "0.1.0"
