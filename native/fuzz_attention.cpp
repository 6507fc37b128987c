// Fuzz target: decode_attention against the textbook's formula in double precision, blocks and heads of any number.
// With Clang it is a libFuzzer target; elsewhere fuzz_main.cpp feeds it.

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "attention.hpp"

namespace {

float widened(float value) { return value; }
float widened(std::uint16_t value) { return std::bit_cast<float>(std::uint32_t{value} << 16); }

void narrow(float value, float& to) { to = value; }
void narrow(float value, std::uint16_t& to) {
    to = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(value) >> 16);
}

// Exactly as long as needed and on the heap, so that ASan sees one element too many.
template <class Element>
std::unique_ptr<Element[]> random_values(std::size_t count, std::mt19937_64& random) {
    auto values = std::make_unique<Element[]>(count);
    std::normal_distribution<float> normal;
    for (std::size_t i = 0; i < count; ++i) {
        narrow(normal(random), values[i]);
    }
    return values;
}

template <class Element>
std::vector<double> textbook(const penstock::DecodeAttention<Element>& call, std::size_t row, std::size_t head) {
    const auto length = static_cast<std::size_t>(call.lengths[row]);
    const std::size_t first = call.window > 0 && length > call.window ? length - call.window : 0;
    const std::size_t kv_head = head / (call.heads / call.kv_heads);
    const Element* query = call.query + (row * call.heads + head) * call.head_dim;
    const auto offset = [&](std::size_t token) {
        const auto block = static_cast<std::size_t>(call.tables[row * call.table_width + token / call.block_size]);
        return block * call.block_stride +
               (token % call.block_size * call.kv_heads + kv_head) * call.head_dim;
    };
    std::vector<double> scores;
    for (std::size_t token = first; token < length; ++token) {
        double score = 0;
        for (std::size_t i = 0; i < call.head_dim; ++i) {
            score += double{widened(query[i])} * double{widened(call.keys[offset(token) + i])};
        }
        score *= double{call.scale};
        scores.push_back(call.softcap > 0 ? double{call.softcap} * std::tanh(score / double{call.softcap}) : score);
    }
    const double highest = *std::ranges::max_element(scores);
    double total = 0;
    for (double& score : scores) {
        score = std::exp(score - highest);
        total += score;
    }
    std::vector<double> out(call.head_dim);
    for (std::size_t token = first; token < length; ++token) {
        for (std::size_t i = 0; i < call.head_dim; ++i) {
            out[i] += scores[token - first] / total * double{widened(call.values[offset(token) + i])};
        }
    }
    return out;
}

template <class Element>
void compare(const std::uint8_t (&choice)[8], std::mt19937_64& random, double tolerance) {
    constexpr std::size_t kBlocks = 7;
    penstock::DecodeAttention<Element> call{};
    call.rows = choice[0] % 3 + 1;
    call.kv_heads = choice[1] % 3 + 1;
    call.heads = call.kv_heads * (choice[2] % 9 + 1);
    call.head_dim = penstock::kHeadDimStep * (choice[3] % 9 + 1);
    call.block_size = choice[4] % 17 + 1;
    call.table_width = choice[5] % 5 + 1;
    call.window = choice[6] % 4 == 0 ? choice[6] / 4 % 20 : 0;
    call.softcap = choice[7] % 4 == 0 ? 5.0F : 0.0F;
    call.scale = 1.0F / std::sqrt(static_cast<float>(call.head_dim));

    const std::size_t layer = call.block_size * call.kv_heads * call.head_dim;
    call.block_stride = 2 * layer;
    const std::size_t out_size = call.rows * call.heads * call.head_dim;
    const auto storage = random_values<Element>(kBlocks * call.block_stride, random);
    const auto query = random_values<Element>(out_size, random);
    const auto out = std::make_unique<Element[]>(out_size);
    const auto tables = std::make_unique<std::int32_t[]>(call.rows * call.table_width);
    const auto lengths = std::make_unique<std::int64_t[]>(call.rows);
    std::generate_n(tables.get(), call.rows * call.table_width,
                    [&] { return static_cast<std::int32_t>(random() % kBlocks); });
    std::generate_n(lengths.get(), call.rows,
                    [&] { return static_cast<std::int64_t>(random() % (call.table_width * call.block_size) + 1); });
    call.keys = storage.get();
    call.values = storage.get() + layer;
    call.query = query.get();
    call.out = out.get();
    call.tables = tables.get();
    call.lengths = lengths.get();

    penstock::decode_attention(call);
    for (std::size_t row = 0; row < call.rows; ++row) {
        for (std::size_t head = 0; head < call.heads; ++head) {
            const std::vector<double> expected = textbook(call, row, head);
            for (std::size_t i = 0; i < call.head_dim; ++i) {
                const double got = double{widened(call.out[(row * call.heads + head) * call.head_dim + i])};
                if (!(std::abs(got - expected[i]) <= tolerance * std::max(1.0, std::abs(expected[i])))) {
                    std::fprintf(stderr, "decode_attention differs at row %zu, head %zu, element %zu: %g, not %g\n",
                                 row, head, i, got, expected[i]);
                    std::abort();
                }
            }
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    std::uint8_t choice[8]{};
    std::copy_n(data, std::min(size, sizeof choice), choice);
    std::seed_seq seed(data, data + std::min<std::size_t>(size, 32));
    std::mt19937_64 random(seed);
    compare<float>(choice, random, 1e-5);
    compare<std::uint16_t>(choice, random, 1e-2);
    return 0;
}
