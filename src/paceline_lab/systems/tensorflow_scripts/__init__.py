"""Scripts that run under TensorFlow's own environment, where there is neither torch nor paceline.

Each is started by its path; `work.py` has the job's data, `keras_models.py` the models with the weights of torch's.
"""
