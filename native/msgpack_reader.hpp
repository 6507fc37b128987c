// Reads msgpack from bytes that may be anything.

#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace penstock {

class MsgpackReader {
  public:
    explicit MsgpackReader(std::string_view bytes) : bytes_(bytes) {}

    std::size_t at() const { return at_; }
    void go_to(std::size_t at) { at_ = at; }
    std::string_view between(std::size_t start, std::size_t end) const { return bytes_.substr(start, end - start); }

    // Take exactly this; false leaves the reader where it is.
    bool take(std::string_view bytes);

    // Each gives nullopt where something else stands or bytes are missing; the reader is then anywhere.
    std::optional<std::size_t> array();
    std::optional<std::string_view> text();
    std::optional<std::string_view> shortest_text();   // whose length is written in the fewest bytes
    std::optional<std::string_view> shortest_binary(); // likewise

    // Skip so many values, whatever they are; false where they do not end, or are too deep.
    bool skip(std::size_t values, int depth = 0);

  private:
    std::optional<std::uint64_t> number(std::size_t bytes);
    std::optional<std::string_view> run(std::uint64_t size);
    std::optional<std::uint8_t> byte();

    std::string_view bytes_;
    std::size_t at_ = 0;
};

}  // namespace penstock
