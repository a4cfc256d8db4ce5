#pragma once
namespace ladder::emu {
struct Observer {};
}
