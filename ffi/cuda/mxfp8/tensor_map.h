// What the tensor copy engine must know about a matrix of bytes in device memory.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace jax_pcie::cuda::mxfp8 {

// A row-major matrix of bytes, copied in boxes of `box_rows` x 128 bytes with the 128-byte swizzle:
// 16-byte chunk c of a box's row r lands at chunk c ^ (r % 8). What a box has outside the matrix
// becomes zero.
//
// `base` and `stride_bytes` are multiples of 16.
CUtensorMap MapOfBytes(const void* base, int64_t rows, int64_t columns, int64_t stride_bytes,
                       int box_rows);

}  // namespace jax_pcie::cuda::mxfp8
