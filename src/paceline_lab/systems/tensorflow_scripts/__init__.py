"""Scripts that run in TensorFlow's own environment, without torch and paceline.

Read `strategies.py` first; `keras_models.py` has the models with the weights from torch.
"""
