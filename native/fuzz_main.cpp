// Feeds a fuzz target with seeded random bytes where there is no libFuzzer; takes the same two flags.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

int main(int argc, char** argv) {
    unsigned long long runs = 0;
    unsigned long long seed = 0;
    if (argc != 3 || std::sscanf(argv[1], "-runs=%llu", &runs) != 1 || std::sscanf(argv[2], "-seed=%llu", &seed) != 1) {
        std::fprintf(stderr, "usage: %s -runs=N -seed=N\n", argv[0]);
        return 2;
    }
    std::mt19937_64 random(seed);
    for (unsigned long long run = 0; run < runs; ++run) {
        std::vector<std::uint8_t> data(random() % 6000);
        std::ranges::generate(data, [&] { return static_cast<std::uint8_t>(random()); });
        LLVMFuzzerTestOneInput(data.data(), data.size());
    }
    std::printf("%s: %llu inputs, none differs\n", argv[0], runs);
    return 0;
}
