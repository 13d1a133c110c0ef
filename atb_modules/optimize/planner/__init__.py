"""The fusion planner: which neighbours of a layer to fuse on a chip, decided away from it, by bytes that are saved.

``plan = plan_layer(LayerShape(...), "ascend910b1")``, ``print(plan)``, ``plan.apply(layer)``.
"""

from atb_modules.fusions import Fusion
from atb_modules.optimize.planner.plan import FusionPlan, Group, Rejection, plan_layer, plan_steps
from atb_modules.optimize.planner.rules import RULES, Rule
from atb_modules.optimize.planner.shapes import LayerShape, shape_of
from atb_modules.optimize.planner.steps import Buffer, Step, layer_steps

__all__ = [
    "RULES",
    "Buffer",
    "Fusion",
    "FusionPlan",
    "Group",
    "LayerShape",
    "Rejection",
    "Rule",
    "Step",
    "layer_steps",
    "plan_layer",
    "plan_steps",
    "shape_of",
]
