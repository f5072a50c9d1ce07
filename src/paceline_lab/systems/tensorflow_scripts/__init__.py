"""Scripts that run in TensorFlow's own environment, without torch and paceline.

Read `strategies.py` first. `keras_models.py` builds the models and loads torch's weights into them.
"""
