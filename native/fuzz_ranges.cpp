// Fuzz target: lists of ranges (bounds, merging, copying on threads) and checksums against what is plain to see.
// With Clang it is a libFuzzer target; elsewhere fuzz_main.cpp feeds it.

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "checksum.hpp"
#include "ranges.hpp"

namespace {

using Numbers = std::vector<std::uint64_t>;
__extension__ using Wide = unsigned __int128;

void expect(bool holds, const char* what) {
    if (!holds) {
        std::fprintf(stderr, "%s differs\n", what);
        std::abort();
    }
}

// Often small, often at the end of 64 bits.
std::uint64_t any_number(std::mt19937_64& random) {
    switch (random() % 4) {
        case 0: return random();
        case 1: return std::numeric_limits<std::uint64_t>::max() - random() % 8;
        default: return random() % 16;
    }
}

void compare_bounds(std::mt19937_64& random) {
    Numbers offsets(random() % 6);
    Numbers lengths(offsets.size());
    std::ranges::generate(offsets, [&] { return any_number(random); });
    std::ranges::generate(lengths, [&] { return any_number(random); });
    const std::uint64_t size = any_number(random);
    std::ptrdiff_t expected = -1;
    for (std::size_t i = offsets.size(); i-- > 0;) {
        if (Wide{offsets[i]} + lengths[i] > size) {
            expected = static_cast<std::ptrdiff_t>(i);
        }
    }
    expect(penstock::first_outside(offsets, lengths, size) == expected, "first_outside");
}

// Merged or not, byte k of the list stays byte k, and no two neighbours are left that could be one.
void compare_merging(std::mt19937_64& random) {
    const std::size_t count = random() % 12;
    Numbers columns[5];
    for (std::size_t i = 0; i < count; ++i) {
        const bool goes_on = i > 0 && random() % 2 == 0;
        columns[0].push_back(goes_on ? columns[0][i - 1] + columns[2][i - 1] : random() % 10);
        columns[1].push_back(goes_on ? columns[1][i - 1] + columns[2][i - 1] : random() % 10);
        columns[2].push_back(random() % 4);
        columns[3].push_back(goes_on ? columns[3][i - 1] : random() % 2);
        columns[4].push_back(goes_on ? columns[4][i - 1] : random() % 2);
    }
    const bool by_region = random() % 2 == 0;
    if (!by_region) {
        columns[3].assign(columns[3].size(), 0);
        columns[4].assign(columns[4].size(), 0);
    }
    Numbers merged[5];
    for (Numbers& column : merged) {
        column.resize(count);
    }
    const penstock::Pairs pairs{columns[0], columns[1], columns[2], by_region ? penstock::Column(columns[3]) : penstock::Column(),
                                by_region ? penstock::Column(columns[4]) : penstock::Column()};
    const std::size_t left = penstock::coalesce(
        pairs, {merged[0].data(), merged[1].data(), merged[2].data(), merged[3].data(), merged[4].data()});
    const auto every_byte = [](const Numbers(&list)[5], std::size_t rows) {
        std::vector<std::array<std::uint64_t, 4>> bytes;
        for (std::size_t i = 0; i < rows; ++i) {
            for (std::uint64_t at = 0; at < list[2][i]; ++at) {
                bytes.push_back({list[0][i] + at, list[1][i] + at, list[3][i], list[4][i]});
            }
        }
        return bytes;
    };
    expect(every_byte(columns, count) == every_byte(merged, left), "coalesce");
    for (std::size_t i = 0; i < left; ++i) {
        expect(merged[2][i] > 0, "coalesce: an empty range");
        expect(i == 0 || merged[0][i] != merged[0][i - 1] + merged[2][i - 1] ||
                   merged[1][i] != merged[1][i - 1] + merged[2][i - 1] || merged[3][i] != merged[3][i - 1] ||
                   merged[4][i] != merged[4][i - 1],
               "coalesce: neighbours");
    }
}

// On the heap and exactly as long as needed, so that ASan sees one byte too many.
void compare_copies(std::mt19937_64& random) {
    const std::uint64_t size = random() % 64 == 0 ? random() % (24U << 20U) : random() % 5000;
    std::vector<std::uint8_t> source(size);
    std::vector<std::uint8_t> target(size);
    std::vector<std::uint8_t> expected(size);
    for (std::size_t i = 0; i < size; i += 1 + i / 64) {
        source[i] = static_cast<std::uint8_t>(random());
    }
    Numbers targets;
    Numbers sources;
    Numbers lengths;
    for (std::uint64_t at = 0; at < size;) {
        const std::uint64_t length = std::min(size - at, random() % (size / (1 + random() % 40) + 1));
        const std::uint64_t from = random() % (size - length + 1);
        targets.push_back(reinterpret_cast<std::uintptr_t>(target.data() + at));
        sources.push_back(reinterpret_cast<std::uintptr_t>(source.data() + from));
        lengths.push_back(length);
        std::copy_n(source.data() + from, length, expected.data() + at);
        at += length + random() % 3;
    }
    const std::uint8_t stop = 0;
    expect(penstock::copy_ranges(targets, sources, lengths, random() % 4, random() % 2 == 0 ? &stop : nullptr),
           "copy_ranges: stopped");
    expect(target == expected, "copy_ranges");
    std::ranges::fill(target, std::uint8_t{0});
    std::vector<std::uint32_t> sums(lengths.size());
    expect(penstock::copy_summed(targets, sources, lengths, sums.data(), random() % 4, &stop), "copy_summed: stopped");
    for (std::size_t i = 0; i < lengths.size(); ++i) {
        expect(sums[i] == penstock::crc32c(0, {reinterpret_cast<const std::byte*>(sources[i]), lengths[i]}),
               "copy_summed: sum");
    }
    expect(target == expected, "copy_summed");
}

void compare_checksums(std::mt19937_64& random) {
    std::vector<std::byte> bytes(random() % 8 == 0 ? random() % 20000 : random() % 600);
    std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
    std::uint32_t expected = ~std::uint32_t{0};
    for (const std::byte byte : bytes) {
        expected ^= static_cast<std::uint32_t>(byte);
        for (int bit = 0; bit < 8; ++bit) {
            expected = (expected >> 1U) ^ ((expected & 1U) != 0 ? 0x82f63b78 : 0);
        }
    }
    expected = ~expected;
    const std::span<const std::byte> all = bytes;
    const std::size_t half = bytes.empty() ? 0 : random() % bytes.size();
    for (penstock::Crc32c* sum : {penstock::crc32c, penstock::crc32c_portable}) {
        expect(sum(0, all) == expected, "crc32c");
        expect(sum(sum(0, all.first(half)), all.subspan(half)) == expected, "crc32c in two parts");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    std::seed_seq seed(data, data + std::min<std::size_t>(size, 32));
    std::mt19937_64 random(seed);
    compare_bounds(random);
    compare_merging(random);
    compare_copies(random);
    compare_checksums(random);
    return 0;
}
