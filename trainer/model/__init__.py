"""The model and its training step.

`embedding.py` has the tables and layers, `towers.py` builds both towers of them, `two_tower.py` is the model;
`step.py` trains it by a batch, with the optimisers of `trainer/optimizers.py`.
"""
