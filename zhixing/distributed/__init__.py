"""Training with several processes: workers that collect, learners that share updates, and parameter servers.

This is the only folder that imports ray.
"""
