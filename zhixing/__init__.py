"""zhixing (知行): deep reinforcement learning on PyTorch."""
