"""Scripts that run under TensorFlow's own environment, where there is neither torch nor paceline.

Read `strategies.py` first; `keras_models.py` has the models with the weights of torch's.
"""
