"""Mixed-precision training for JAX as one composable optax transformation."""

from mpopt._casting import Policy as Policy
from mpopt._inspect import grads_finite as grads_finite
from mpopt._inspect import loss_scale as loss_scale
from mpopt._inspect import master_params as master_params
from mpopt._inspect import metrics as metrics
from mpopt._inspect import nonfinite_params as nonfinite_params
from mpopt._inspect import raise_if_stalled as raise_if_stalled
from mpopt._inspect import where_applied as where_applied
from mpopt._loss import scale_loss as scale_loss
from mpopt._loss import value_and_grad as value_and_grad
from mpopt._loss_scale import LossScale as LossScale
from mpopt._loss_scale import LossScaleState as LossScaleState
from mpopt._loss_scale import dynamic_loss_scale as dynamic_loss_scale
from mpopt._loss_scale import static_loss_scale as static_loss_scale
from mpopt._masters import with_master_params as with_master_params
from mpopt._mixed_precision import mixed_precision as mixed_precision
from mpopt._scaling import unscale as unscale
from mpopt._scaling import with_loss_scale as with_loss_scale
from mpopt._sharding import opt_state_sharding as opt_state_sharding

__version__ = "0.1.0"
