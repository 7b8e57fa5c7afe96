"""Graphs in other formats, made into dataset folders."""
