"""Actors spread over workers: in this process, taking turns, or on Ray. The only folder that imports ray."""
