"""Graphs, partitions, the layout of rows over ranks, and the sharding of a user's data."""
