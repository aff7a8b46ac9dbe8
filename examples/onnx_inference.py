"""Run an exported agent with ONNX Runtime and NumPy, without zhixing and torch.

Make the file with `zhixing export cartpole -o exported --format onnx`. This is the whole program of a robot or a game.
"""

import sys

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1] if len(sys.argv) > 1 else "exported/agent.onnx")
obs_input, *memory = session.get_inputs()  # a recurrent agent has its hidden state as further inputs
hidden = [np.zeros([1, *port.shape[1:]], np.float32) for port in memory]  # zeros when an episode starts
obs = np.array([[0.0, 0.1, 0.02, -0.1]], np.float32)  # [N, ...]: any number of observations at once
for step in range(3):
    inputs = [obs, *hidden]
    action, *hidden = session.run(None, dict(zip([port.name for port in session.get_inputs()], inputs, strict=True)))
    print(f"step {step}: action {action[0]}")
