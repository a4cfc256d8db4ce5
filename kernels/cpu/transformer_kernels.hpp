// The inside of transformer.hpp: what one instruction set has to provide. The code is the same for all
// (transformer_body.hpp), written in vectors of 16 floats that each instruction set defines.
#pragma once

#include <cstdint>

namespace ladder::cpu {

inline constexpr int kPiecePositions = 256;  // positions of one attention piece

/// What a piece of positions gives one head: sum of exp(score - largest) and the values weighted with it.
struct PieceResult {
  float largest, sum;
};

/// The heads of one group, one token, positions first..last-1 of a piece.
struct AttentionPiece {
  const float* q;      // [group][head_dim], scaled by 1 / sqrt(head_dim)
  const void* keys;    // of the kv head: [blocks][head_dim][16]
  const void* values;  // of the kv head: [context][value_length]
  int group, head_dim;
  int value_length;      // head_dim rounded up to 16
  int first, last;       // first is a multiple of kPiecePositions
  PieceResult* results;  // [group]
  float* weighted;       // [group][value_length]
};

struct TransformerKernels {
  void (*rms_norm)(const float* x, const float* weight, float* out, long long d, float epsilon);
  void (*add)(float* x, const float* y, long long count);
  void (*swiglu)(float* gate, const float* up, long long count);
  void (*rotate)(float* head, const float* cosines, const float* sines, int head_dim);
  void (*to_halves)(const float* x, std::uint16_t* out, long long count);
  void (*piece_f16)(const AttentionPiece& piece);
  void (*piece_f32)(const AttentionPiece& piece);
  /// out[head_dim] of one head from its pieces. @param results, weighted of piece i at i * stride of each
  void (*combine)(const PieceResult* results, long long result_stride, const float* weighted,
                  long long weighted_stride, int pieces, float* out, int head_dim);
};

extern const TransformerKernels kTransformerPortable;
#if defined(__x86_64__)
extern const TransformerKernels kTransformerAvx2;
extern const TransformerKernels kTransformerAvx512;
#endif

}  // namespace ladder::cpu
