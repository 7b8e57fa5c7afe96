"""A GPU that is emulated on cores: its memory, its lanes, its kernels in Triton's interpreter."""
