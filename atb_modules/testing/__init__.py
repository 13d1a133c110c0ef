"""The parity harness: compare a kernel with the float64 reference. Public, so that users can test their own kernels."""

from atb_modules.testing.devices import device_under_test, strategies_under_test
from atb_modules.testing.memory import peak_memory, poisoned_memory
from atb_modules.testing.parity import Comparison, assert_parity, compare
from atb_modules.testing.plain import plain_attention, plain_paged_attention, summation_orders
from atb_modules.testing.quantized import code_products_bound, quantization_bound
from atb_modules.testing.seeds import fresh_generator

__all__ = [
    "Comparison",
    "assert_parity",
    "code_products_bound",
    "compare",
    "fresh_generator",
    "peak_memory",
    "plain_attention",
    "plain_paged_attention",
    "poisoned_memory",
    "quantization_bound",
    "summation_orders",
    "device_under_test",
    "strategies_under_test",
]
