// Attention of decode rows: one new query a sequence, over the keys and values in its blocks.
//
// The blocks are read where they lie. The oracle is the gathering reference in src/penstock/engine/paged/step.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace penstock {

// Element is float, or std::uint16_t for bfloat16. Sums are float in both cases.
template <class Element>
struct DecodeAttention {
    const Element* query;          // (rows, heads, head_dim)
    const Element* keys;           // the layer's keys of block 0, (block_size, kv_heads, head_dim)
    const Element* values;         // as `keys`
    const std::int32_t* tables;    // (rows, table_width) block ids
    const std::int64_t* lengths;   // (rows) tokens to attend to
    Element* out;                  // as `query`
    std::size_t rows;
    std::size_t heads;
    std::size_t kv_heads;          // divides heads: kv head g serves heads [g * heads / kv_heads, ...)
    std::size_t head_dim;          // a multiple of 16
    std::size_t block_size;
    std::size_t block_stride;      // elements from a block to the next one
    std::size_t table_width;
    std::size_t window;            // only so many newest tokens count; 0: all
    float scale;
    float softcap;                 // 0: none
};

constexpr std::size_t kHeadDimStep = 16;

// The fastest one that this CPU runs.
void decode_attention(const DecodeAttention<float>& call);
void decode_attention(const DecodeAttention<std::uint16_t>& call);

}  // namespace penstock
