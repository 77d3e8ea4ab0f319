#include "flodl/layout.h"

#include "doctest/doctest.h"

using namespace flodl;

namespace {

Layout sound() {
  Layout layout;
  layout.bytes = 1024;
  layout.sections = {{Rule::parameter, DType::f32, 0, 100, 0},
                     {Rule::buffer, DType::f32, 448, 40, 0},
                     {Rule::pooled_var, DType::f32, 640, 20, 448 + 80},
                     {Rule::largest, DType::i64, 768, 32, 0}};
  return layout;
}

void refuses(const Layout& layout, const char* words) {
  const Status status = layout.check();
  CHECK(status.code() == Code::invalid_argument);
  CHECK_MESSAGE(status.message().find(words) != std::string::npos, status.message());
}

}  // namespace

TEST_CASE("a sound layout and an empty one pass") {
  CHECK(sound().check().is_ok());
  CHECK(Layout{}.check().is_ok());
}

TEST_CASE("sizes that are ragged or too large are refused") {
  Layout layout = sound();
  layout.bytes = 1000;
  refuses(layout, "multiple of 64");
  layout.bytes = kMaxLayoutBytes + 64;
  refuses(layout, "at most");
}

TEST_CASE("sections out of place are refused by number") {
  Layout layout = sound();
  layout.sections[1].offset = 450;
  refuses(layout, "section 1: offset 450");
  layout = sound();
  layout.sections[1].offset = 384;
  refuses(layout, "end of the section before it");
  layout = sound();
  layout.sections[3].count = 33;
  refuses(layout, "reach beyond");
  layout = sound();
  layout.sections[3].count = ~std::uint64_t{0} / 8 + 2;
  refuses(layout, "reach beyond");
  layout = sound();
  layout.sections[3].offset = 2048;
  refuses(layout, "reach beyond");
}

TEST_CASE("a dtype that does not fit its rule is refused") {
  Layout layout = sound();
  layout.sections[0].dtype = DType::i32;
  refuses(layout, "floating-point");
  layout = sound();
  layout.sections[3].dtype = DType::f32;
  refuses(layout, "integers only");
  layout = sound();
  layout.sections[0].dtype = static_cast<DType>(200);
  refuses(layout, "none that this version knows");
  layout = sound();
  layout.sections[0].rule = static_cast<Rule>(99);
  refuses(layout, "none that this version knows");
}

TEST_CASE("a pooled variance needs its mean inside one buffer section of its dtype") {
  Layout layout = sound();
  layout.sections[2].mean_offset = 448 + 84;
  refuses(layout, "section 2: no buffer section");
  layout.sections[2].mean_offset = 448 + 2;
  refuses(layout, "no buffer section");
  layout.sections[2].mean_offset = 0;
  refuses(layout, "no buffer section");
  layout = sound();
  layout.sections[2].dtype = DType::f64;
  layout.sections[2].count = 10;
  refuses(layout, "no buffer section");
}
