"""Kernels of Ascend NPUs: torch_npu's fused operators and our own Ascend C kernels. Imports without either."""
