"""Mistakes that a type checker refuses, each in the line that says so."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline

model = nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader: DataLoader[tuple[torch.Tensor, ...]] = DataLoader(TensorDataset(torch.zeros(2, 2)))
cluster = paceline.Cluster.load("cluster.yaml")

paceline.train("job.yaml", cluster)  # refused: order
paceline.plan("job.yaml", cluster)  # refused: keyword
paceline.check("job.yaml", "dp=2", cluster)  # refused: keyword
paceline.estimate("job.yaml", cluster="8xH100-SXM")  # refused: no plan
paceline.plan_errors("dp=2", "job.yaml", cluster=3)  # refused: type
paceline.setup(model, optimizer, nn.MSELoss(), loader)  # refused: keyword
paceline.setup(model, optimizer, loss=loader)  # refused: type
paceline.predict("job.yaml", "dp=2")  # refused: gone
paceline.setup(model, optimizer, nonfinite="rewind")  # refused: policy
engine = paceline.setup(model, optimizer, loader=loader)
engine.backward(1.0)  # refused: no tensor
engine.step_ahead()  # refused: no such method
loss: int = engine.update().loss  # refused: a float
metric: paceline.Metric = print  # refused: no metric
error: paceline.PlanErr  # refused: no such name
