// The two products of flash attention on one tile, with a query in each lane of the vectors.
//
// Everything is transposed: scores are (keys, lanes), outputs (channels, lanes). Keys and values are then
// read in place, as scalars that are broadcast, whatever their strides; the softmax runs down the lanes
// without a shuffle.
#pragma once
#include "simd.h"

namespace ATB_ISA {

constexpr int LANES = 64; // queries of one block
// Floats from one row of lanes to the next: not a power of two, which would crowd a column into few cache
// sets.
constexpr int STRIDE = LANES + 16;
constexpr int KEYS = 64; // keys of one tile

// score (keys, LANES) = the keys' rows times q (head_dim, LANES), for the first `vectors` vectors of lanes.
void scores_of(const float *const *k, int64_t keys, const float *q, int64_t head_dim, int vectors,
               float *score);

// out (head_dim, LANES) = out * alpha[lane] + the values' rows times the weights p (keys, LANES).
void values_of(const float *const *value, int64_t keys, const float *p, int64_t head_dim, int vectors,
               const float *alpha, float *out);

// Scores of n keys become weights; m and l move on, alpha is the factor for what was summed before.
void soften_tile(float *score, int64_t n, int vectors, float *m, float *l, float *alpha);

} // namespace ATB_ISA
