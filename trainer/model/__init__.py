"""The model and its training step.

`embedding.py` has the tables and layers, `towers.py` builds both towers from them, and `two_tower.py` holds the model.
`step.py` trains the model on a batch, with the optimizers of `trainer/optimizers.py`.
"""
